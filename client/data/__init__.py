"""The samples that a training script draws: leased ones, shares of them, and whether peers draw the
same.
"""
