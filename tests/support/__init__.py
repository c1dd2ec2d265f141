"""What several test files share: models, runs and what is seen of them, oracles, commands."""
