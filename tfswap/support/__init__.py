"""Files, sizes, progress, and other helpers that do not depend on graphs. Imports only tfswap's errors."""
