"""What a policy does at run time."""
