"""How float32 values become bytes on the wire, and back; what a lossy codec leaves out."""
