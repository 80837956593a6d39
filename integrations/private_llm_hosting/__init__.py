"""What an organisation runs that hosts a party: its settings file, operator port, logs and certificates."""
