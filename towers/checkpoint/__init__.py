"""Checkpoints on disk: whole or damaged, of this model or another."""
