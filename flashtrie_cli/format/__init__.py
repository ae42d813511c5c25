"""The file format: layout, writer, and the reader that is the only door."""
