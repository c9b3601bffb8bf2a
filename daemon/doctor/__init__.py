"""``holdfast doctor``: what would keep this machine from taking part, found before anything is
copied.
"""
