"""Further towers as copies of the finished graph of the first one."""
