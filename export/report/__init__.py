"""The report of an export, as figures, tables and plots."""
