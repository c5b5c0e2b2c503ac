//! The known name that a misspelled one probably means.

/// The longest name for which a nearest one is looked for, in bytes.
const LONGEST_NAME: usize = 64;

/// Returns the known name that was probably meant, if one is near.
pub fn nearest<K: AsRef<str> + Ord>(name: &str, known: impl Iterator<Item = K>) -> Option<K> {
    nearest_of(name, known, usize::MAX)
}

/// Returns the nearest known name, if one is near, and compares at most `most` names of about its length.
///
/// To compare two names takes time in the product of their lengths, so long names have no nearest one.
pub fn nearest_of<K: AsRef<str> + Ord>(
    name: &str,
    known: impl Iterator<Item = K>,
    most: usize,
) -> Option<K> {
    let farthest = |known: &K| known.as_ref().len() / 3 + 1;
    known
        .filter(|_| name.len() <= LONGEST_NAME)
        .filter(|known| known.as_ref().len().abs_diff(name.len()) <= farthest(known))
        .take(most)
        .map(|known| (strsim::osa_distance(name, known.as_ref()), known))
        .filter(|(distance, known)| *distance <= farthest(known))
        .min()
        .map(|(_, near)| near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_differs_in_at_most_a_third_of_its_letters_and_one() {
        let known = ["api", "login", "search"];
        let nearest = |name| nearest(name, known.into_iter());
        assert_eq!(nearest("serach"), Some("search"));
        assert_eq!(nearest("logn"), Some("login"));
        assert_eq!(nearest("seaxxch"), Some("search"));
        assert_eq!(nearest("sxxxxch"), None);
        assert_eq!(nearest(&"search".repeat(11)), None);
    }

    #[test]
    fn only_so_many_names_are_compared() {
        let known = ["xxxxxx", "search"];
        assert_eq!(nearest_of("serach", known.into_iter(), 1), None);
        assert_eq!(nearest_of("serach", known.into_iter(), 2), Some("search"));
    }
}
