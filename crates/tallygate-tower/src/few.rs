//! A list that mostly has one item, and then needs no memory on the heap: most services have one rule.

#[derive(Debug)]
pub(crate) struct Few<T> {
    first: Option<T>,
    more: Vec<T>,
}

impl<T> Few<T> {
    pub(crate) const fn new() -> Self {
        Self { first: None, more: Vec::new() }
    }

    #[inline]
    pub(crate) fn push(&mut self, item: T) {
        match self.first {
            None => self.first = Some(item),
            Some(_) => self.more.push(item),
        }
    }

    pub(crate) fn last(&self) -> Option<&T> {
        self.more.last().or(self.first.as_ref())
    }

    /// Removes the last item.
    pub(crate) fn pop(&mut self) {
        if self.more.pop().is_none() {
            self.first = None;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.more)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(&mut self.more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stay_in_order() {
        let mut few = Few::new();
        for item in 1..=3 {
            few.push(item);
            few.iter_mut().for_each(|item| *item *= 10);
        }
        assert_eq!(few.iter().copied().collect::<Vec<_>>(), [1_000, 200, 30]);
        for last in [30, 200, 1_000] {
            assert_eq!(few.last(), Some(&last));
            few.pop();
        }
        assert_eq!(few.last(), None);
    }
}
