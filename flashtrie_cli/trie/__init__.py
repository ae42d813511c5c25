"""Building tries, their statistics, and exact and prefix queries."""
