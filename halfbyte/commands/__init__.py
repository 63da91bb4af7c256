"""The commands about models, one file each. Nothing heavy is imported before a command runs."""
