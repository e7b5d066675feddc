"""What an export chose and what that costs, as tables and plots."""
