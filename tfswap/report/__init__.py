"""What is told of a plan: tables, the page, pictures, traces."""
