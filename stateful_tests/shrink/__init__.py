"""The smallest trace that still violates its clause. A function says what fails; nothing here knows why."""
