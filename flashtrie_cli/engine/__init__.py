"""One protocol, three engines: reference (plain Python, the oracle), cpu (C++), cuda (PyCUDA)."""
