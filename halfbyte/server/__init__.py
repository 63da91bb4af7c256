"""OpenAI's API over HTTP: what comes in is checked, runs in the scheduler's one engine, and streams out."""
