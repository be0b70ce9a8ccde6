"""An OpenAI-compatible HTTP server over one engine."""
