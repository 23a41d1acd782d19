"""Checks the claim that N towers with N times the batch train as well per example at r sqrt(N).

`make scaling` runs it; `__main__` has the flags, `arms` what is compared, `runs` runs train.py,
`results` reads what came out, `claim` judges it, `report` writes table and CSV, `plots` draws.
"""
