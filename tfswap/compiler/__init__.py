"""From a graph and a limit to a plan and a rewritten graph. Nothing runs here."""
