"""What a person reads when something is wrong: doctor."""
