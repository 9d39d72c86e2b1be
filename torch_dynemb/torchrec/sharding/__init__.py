"""How ids of dynamic tables reach the ranks that own them, and rows come back."""
