"""Who is running now: the ambient strategy, and the replica if there is one.

Layer: above ``collectives``; names strategies in annotations only.
"""
