"""How two members get a connection: dialled in turn, through two routers, and what both say
first.
"""
