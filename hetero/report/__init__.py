"""What is told about a machine and a model: profiles as tables, JSON and pages."""
