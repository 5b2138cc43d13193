"""Other libraries' training loops as learners. Each module needs its library, and is imported only where it is used."""
