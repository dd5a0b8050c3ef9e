"""Speed, measured: scripts that print and save what they find."""
