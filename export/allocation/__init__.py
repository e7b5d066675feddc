"""Which weights get how many bits: by what they cost in quality, bytes and time."""
