"""What lighthouse, managers and trainers show of themselves to monitoring: metrics and traces."""
