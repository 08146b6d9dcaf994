"""What crosses a site's boundary, and what it cost."""
