"""Files, sizes, progress, and other helpers that know nothing of graphs. Imports nothing of tfswap but its errors."""
