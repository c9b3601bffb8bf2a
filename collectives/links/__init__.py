"""Links: all bulk bytes between two members, over lanes that are opened, measured and shared fairly."""
