"""Options and arguments of the public API: what each means, its type and its range."""
