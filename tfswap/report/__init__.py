"""Reports of a plan: tables, the page, pictures, traces."""
