"""Bytes, lines and arrays of input files: decompressed, cut and streamed, whatever they will mean."""
