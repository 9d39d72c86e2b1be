"""State and data that ranks share: seed, owners of ids, agreement on options, exchange of rows."""
