"""The run around the towers: sessions, hooks, evaluation, schedules, files."""
