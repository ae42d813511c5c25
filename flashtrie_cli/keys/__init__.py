"""Readers: text, ids, JSONL and npz to key sequences; tokenizers; vocabulary."""
