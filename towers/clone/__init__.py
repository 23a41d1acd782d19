"""Further towers as clones of the finished graph of the first one."""
