"""Networks for the application: `models.registry` finds them by name."""
