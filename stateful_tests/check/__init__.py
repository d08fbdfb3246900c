"""Random runs in volume, as `kvspec check` does them, and fixtures made of what they find. How a report
looks is for `ci` to say."""
