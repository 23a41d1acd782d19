"""What towers costs and gains, measured beside what people would pick instead. Not installed."""
