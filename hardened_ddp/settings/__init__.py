"""What the user asked for: typed settings from defaults, a YAML file and the command line."""
