"""What a beam search, a mask or a draft tree means: plans, limits, proposals in, results out."""
