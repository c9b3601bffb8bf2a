"""How two members get a connection: dialled in turn, through routers, and what both say first."""
