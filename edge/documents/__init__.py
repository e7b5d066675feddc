"""Documents that conversations are answered from: their text, an index of passages, what goes into a prompt."""
