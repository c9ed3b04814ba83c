"""Words and rules of Poros: plugin contracts, block plan, schedule, gates."""
