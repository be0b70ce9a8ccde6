"""From a prompt to tokens: loading, sampling and the decode loop."""
