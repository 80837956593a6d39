"""One operation under one name, on every device."""
