"""What is measured, with what, and how it is drawn."""
