"""What is right and wrong with a machine: findings, measurements, and the profile that plans use."""
