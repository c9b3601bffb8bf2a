"""Codecs between float32 values and bytes on the wire, compression, and error feedback."""
