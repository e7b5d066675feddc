"""What every way of asking a model shares: request bodies, answer objects, models that are open."""
