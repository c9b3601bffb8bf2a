"""How two members reach each other, which pairs have failed, and whose line is measured."""
